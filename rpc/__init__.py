"""gRPC plumbing that all three services share.

`server` starts a server with health, reflection and error mapping; `errors` turns named errors into statuses and
back; `wire` turns the values of `engine.core` into protobuf messages and back, so that no message travels further;
`session` is a node's side of Attach and Publish; `node` is the process round an engine. It must not know torch, NIXL,
or what an engine does.
"""
