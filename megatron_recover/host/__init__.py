"""What one machine offers to processes: files in memory, locks on files, states of processes, lines on stderr."""
