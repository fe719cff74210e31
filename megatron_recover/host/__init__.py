"""Services of one machine to processes, such as files, locks, addresses and lines on stderr."""
