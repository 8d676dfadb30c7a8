"""The gRPC side of the front door: one module a service. They convert, wait and stream; they decide nothing."""
