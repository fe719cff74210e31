"""Services of one machine to processes: files in memory, locks, process states, lines on stderr."""
