"""Blocks of memory and where they come from; memory shared with clients."""
