"""Nothing of this module can be called from Python; see wire.pxd."""
