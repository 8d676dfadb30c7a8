#!/usr/bin/env bash
# Makes this machine able to run `make test-compose`, and does nothing that is already done:
#
#   1. a container engine answers: where none does, Debian's is installed and started (that needs root);
#   2. the Dockerfile's base image can be had: where no registry is reached, one is made by debootstrap and named
#      kvrelay-base, and wheels/ is filled with the wheels of every dependency, by the pip of this machine.
#
# What step 2 makes is kept in KVRELAY_BUILD_CACHE (default ~/.cache/kvrelay/build), outside the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${KVRELAY_BUILD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrelay/build}
base=kvrelay-base:latest

say() { printf '%s\n' "docker-engine: $*" >&2; }

die() { say "$*"; exit 1; }

install_packages() {
    [ "$(id -u)" = 0 ] || die "no engine answers 'docker info'; start one, or run this as root to install Debian's"
    command -v apt-get > /dev/null || die "no engine answers 'docker info', and this is no Debian to install one on"
    say "installing $*"
    # One update and one more try: lists that are missing or old are the usual reason to fail.
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" > /dev/null 2>&1 \
        || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends "$@" > /dev/null; }
}

ensure_engine() {
    if command -v docker > /dev/null && docker info > /dev/null 2>&1; then
        say "an engine answers"
    else
        command -v dockerd > /dev/null || install_packages docker.io iptables ca-certificates
        local log=/var/log/kvrelay-dockerd.log
        if pidof dockerd > /dev/null; then
            say "dockerd runs and does not answer yet"
        else
            say "starting dockerd, log in $log"
            # Left by a killed engine, they would name any process that has got the number since.
            rm -f /run/docker.pid
            pidof containerd > /dev/null || rm -f /run/docker/containerd/containerd.pid
            # Its own session and no inherited file: it outlives this script, whose caller may wait for its output to end.
            setsid dockerd > "$log" 2>&1 < /dev/null &
        fi
        local deadline=$((SECONDS + 60))
        until docker info > /dev/null 2>&1; do
            ((SECONDS < deadline)) || { tail -n 20 "$log" >&2 || true; die "dockerd did not answer within 60 s"; }
            sleep 0.2
        done
    fi
    docker compose version > /dev/null 2>&1 || command -v docker-compose > /dev/null \
        || install_packages docker-compose
}

# The default of one of the Dockerfile's build arguments.
default_of() { sed -n "s/^ARG $1=//p" Dockerfile; }

# One line per dependency, those of the build included.
requirements() {
    python3 -c "import tomllib; t = tomllib.load(open('pyproject.toml', 'rb')); \
        print(*t['project']['dependencies'], *t['build-system']['requires'], sep='\n')"
}

make_base() {
    if docker image inspect "$base" > /dev/null 2>&1; then say "$base is there"; return; fi
    # The release of this machine: then its Python is the image's, and wheels chosen by its pip fit.
    local suite tarball
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    tarball=$cache/base-$suite.tar
    if [ ! -f "$tarball" ]; then
        command -v debootstrap > /dev/null || install_packages debootstrap
        say "making the base image of $suite (about a minute)"
        local root
        root=$(mktemp -d "$cache/rootfs.XXXXXX")
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" \
            > "$cache/debootstrap.log" 2>&1 || { tail -n 20 "$cache/debootstrap.log" >&2; die "debootstrap failed"; }
        rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
            "$root"/usr/share/{doc,man,locale}/*
        tar -C "$root" --numeric-owner -cf "$tarball.part" .
        mv "$tarball.part" "$tarball"
        rm -rf "$root"
    fi
    docker import "$tarball" "$base" > /dev/null
    say "imported $base"
}

fill_wheels() {
    local demo key wheels
    demo=$(default_of DEMO_MODEL)
    key=$( (requirements; echo "$demo"; python3 --version) | sha256sum | cut -c 1-16)
    wheels=$cache/wheels-$key
    if [ ! -d "$wheels" ]; then
        say "collecting the wheels of every dependency"
        rm -rf "$cache"/wheels-* "$cache/pip"
        python3 -m venv "$cache/pip"
        requirements > "$cache/requirements.txt"
        local collect=("$cache/pip/bin/pip" wheel -q -w "$wheels.part")
        { "${collect[@]}" -r "$cache/requirements.txt" && "${collect[@]}" --no-deps "$demo"; } 2> "$cache/pip.log" \
            || { tail -n 20 "$cache/pip.log" >&2; die "pip could not collect the wheels"; }
        mv "$wheels.part" "$wheels"
    fi
    rm -rf wheels
    cp -al "$wheels" wheels 2> /dev/null || cp -a "$wheels" wheels
    say "wheels/ holds $(ls wheels | wc -l) wheels, $(du -sm wheels | cut -f 1) MB"
}

ensure_engine
# The default of the Dockerfile's BASE_IMAGE is the only image that a build takes from a registry.
default_base=$(default_of BASE_IMAGE)
if docker image inspect "$default_base" > /dev/null 2>&1 \
    || timeout 120 docker pull -q "$default_base" > /dev/null 2>&1; then
    say "the base image is $default_base"
    rm -rf wheels  # of an earlier run without a registry: the build would look at nothing else
else
    say "$default_base cannot be pulled: building without a registry"
    mkdir -p "$cache"
    make_base
    fill_wheels
fi
