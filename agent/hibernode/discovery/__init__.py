"""Where work comes from: the signal directory, and the processes that its files are about."""
