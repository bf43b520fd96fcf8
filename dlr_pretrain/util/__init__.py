"""What every subpackage may use: errors that name their fix, durable files, text, the process, sharded tensors."""
