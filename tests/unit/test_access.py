"""API keys, addresses that others reach, and what options of access must be to each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bootstrap.config import BootstrapConfig
from engine.core.access import (
    ApiKey,
    BootstrapAccess,
    ClientAccess,
    DialTls,
    NodeAccess,
    digest,
    find_key,
    is_loopback,
    new_key,
    parse_api_keys,
)
from engine.core.config import load
from engine.core.errors import ConfigError
from tests.helpers.certificates import Authority

A, B = "a" * 64, "b" * 64


# ---- keys ----


def test_a_new_key_is_known_by_its_line_and_by_no_other() -> None:
    secret, made = new_key("alice", admin=True)
    other, others = new_key("bob", admin=False)
    keys = parse_api_keys(f"{made.line}\n{others.line}\n")
    assert keys == (made, others)
    assert [key.admin for key in keys] == [True, False]
    assert find_key(keys, secret) == made
    assert find_key(keys, other) == others
    for wrong in ("", secret[:-1], f"{secret} ", made.sha256.hex(), "größe"):
        assert find_key(keys, wrong) is None
    assert secret not in made.line
    assert made.sha256.hex() not in repr(made)


def test_keys_are_not_guessed() -> None:
    secrets = {new_key("alice", admin=False)[0] for _ in range(50)}
    assert len(secrets) == 50
    assert all(len(secret) > 43 for secret in secrets)  # 256 bits in base64


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a#b", "ä", "x" * 65])
def test_names_that_would_not_fit_on_a_line(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 letters"):
        new_key(name, admin=False)


def test_keys_files_have_comments_and_variables_have_commas() -> None:
    keys = (ApiKey("alice", bytes.fromhex(A)), ApiKey("bob", bytes.fromhex(B), admin=True))
    assert parse_api_keys(f"# made in May, for two\n\n  alice\t{A}  # hers, for now\nbob {B} admin\n") == keys
    assert parse_api_keys(f"alice {A}, bob {B} admin,") == keys


def test_every_mistake_in_a_keys_file_is_listed_and_none_is_quoted() -> None:
    text = f"alice {A}\nbob {B[1:]}\ncarol {B} root\n\ndave\nalice {B}\nkvrelay-secret\n{B} admin more words\n"
    with pytest.raises(ValueError, match="line 2") as caught:
        parse_api_keys(text)
    problems = str(caught.value).splitlines()
    assert [problem.partition(":")[0] for problem in problems] == [f"line {n}" for n in (2, 3, 5, 6, 7, 8)]
    assert "secret" not in str(caught.value)
    assert B[1:] not in str(caught.value)


def test_one_key_is_of_one_name() -> None:
    with pytest.raises(ValueError, match="line 2: the key of alice once more"):
        parse_api_keys(f"alice {A}\nroot {A} admin\n")


@pytest.mark.parametrize("text", ["", "# none yet\n", " , "])
def test_no_key_at_all_is_a_mistake_and_not_an_open_door(text: str) -> None:
    assert list(BootstrapAccess(api_keys=text).problems()) == ["api_keys: no key in it"]


# ---- addresses ----


@pytest.mark.parametrize("listen", ["127.0.0.1:7070", "127.9.9.9:1", "localhost:0", "[::1]:7070"])
def test_loopback(listen: str) -> None:
    assert is_loopback(listen)


@pytest.mark.parametrize(
    "listen",
    [
        *("0.0.0.0:7070", "[::]:7070", ":::7070", ":7070", "", "7070", "10.0.0.1:1", "0:1", "no-such-host.invalid:1"),
        *("ipv4:127.0.0.1:1,0.0.0.0:1", "unix:/tmp/socket", "[::ffff:10.0.0.1]:1", "\udcff:1", "a" * 70 + ":1"),
    ],
)
def test_others_may_reach_everything_else(listen: str) -> None:
    assert not is_loopback(listen)


def test_listening_to_others_needs_token_and_keys_or_a_word() -> None:
    def problems(listen: str = "0.0.0.0:7070", **options: object) -> list[str]:
        env = {f"KVRELAY_{name.upper()}": str(value) for name, value in options.items()}
        try:
            load(BootstrapConfig, file=None, env=env, flags={"listen": listen})
        except ConfigError as error:
            return list(error.problems)
        return []

    keys = f"alice {A}"
    assert problems("127.0.0.1:7070") == problems("localhost:7070") == []
    both = problems()
    assert len(both) == 2
    assert "join token" in both[0]
    assert "API keys" in both[1]
    assert problems(join_token="x") == both[1:]
    assert problems(api_keys=keys) == both[:1]
    assert problems(api_keys=keys, join_token="x") == []
    assert problems(insecure_listen="true") == []
    assert problems("7070") == ["listen is '7070'; allowed: host:port"]


# ---- TLS files ----


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_good_files_are_no_problem(authority: Authority) -> None:
    pair = authority.sign("bootstrap")
    assert not list(BootstrapAccess(pair.cert, pair.key, authority.ca).problems())
    assert not list(DialTls(authority.ca, pair.cert, pair.key).problems())
    assert not list(BootstrapAccess().problems())
    assert not list(DialTls().problems())


def test_files_that_are_missing_or_do_not_fit_each_other(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.sign("one"), authority.sign("two")
    empty = tmp_path / "empty"
    empty.touch()
    for cert, key in ((one.cert, two.key), (one.key, one.cert), (empty, empty)):
        (problem,) = BootstrapAccess(cert, key).problems()
        assert problem == f"tls_cert {cert} and tls_key {key}: not a PEM certificate and its key"
    (problem,) = BootstrapAccess(one.cert, tmp_path / "none").problems()
    assert problem.endswith("No such file or directory")
    (problem,) = DialTls(empty).problems()
    assert problem == f"tls_ca {empty}: not a PEM file of certificates"


def test_halves_of_what_tls_needs(authority: Authority) -> None:
    pair = authority.sign("one")
    halves = ["tls_cert and tls_key: one is of no use without the other"]
    assert list(BootstrapAccess(tls_cert=pair.cert).problems()) == halves
    assert list(BootstrapAccess(tls_client_ca=authority.ca).problems()) == ["tls_client_ca: needs tls_cert and tls_key"]
    assert list(DialTls(authority.ca, tls_key=pair.key).problems()) == halves
    (problem,) = DialTls(tls_cert=pair.cert, tls_key=pair.key).problems()
    assert problem.startswith("tls_cert: needs tls_ca")


def test_a_locked_key_is_refused_and_not_asked_for(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    pair = authority.sign("one")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    lock = serialization.BestAvailableEncryption(b"word")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
    (problem,) = BootstrapAccess(pair.cert, locked).problems()
    assert problem.endswith("not a PEM certificate and its key")


# ---- secrets ----


@pytest.mark.parametrize("secret", ["", "two words", "line\nbreak", "größe", "x" * 1025])
def test_secrets_that_no_header_can_carry(secret: str) -> None:
    for config in (BootstrapAccess(join_token=secret), NodeAccess(join_token=secret), ClientAccess(api_key=secret)):
        (problem,) = config.problems()
        assert "printable ASCII" in problem
        assert secret not in problem or not secret


def test_no_secret_is_shown() -> None:
    secret = "tell-nobody"
    configs = (
        BootstrapAccess(join_token=secret, api_keys=secret),
        NodeAccess(join_token=secret),
        ClientAccess(api_key=secret),
    )
    assert secret not in repr(configs)
    assert secret not in repr(BootstrapConfig(access=configs[0]))
    assert secret not in "\n".join(configs[0].problems())
    assert {field.name for config in configs for field in dataclasses.fields(config) if not field.repr} == {
        "join_token",
        "api_keys",
        "api_key",
    }


def test_a_digest_is_sha256() -> None:
    assert digest("abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
