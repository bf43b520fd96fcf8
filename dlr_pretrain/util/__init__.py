"""What every room may use: errors with a fix, durable files, text, the process, sharded tensors."""
