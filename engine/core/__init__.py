"""The vocabulary of the system: values, rules and clocks that every process shares. No torch, no sockets."""
