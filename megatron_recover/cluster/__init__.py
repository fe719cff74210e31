"""One machine: the launcher, the agent that starts and watches ranks, the recorder."""
