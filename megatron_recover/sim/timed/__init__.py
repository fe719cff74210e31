"""Jobs of any size on a virtual clock."""
