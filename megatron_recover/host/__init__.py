"""Services of one machine to processes: files, locks, addresses, processes, lines on stderr."""
