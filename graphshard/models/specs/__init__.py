"""Models as specs: a config.json, a module on the meta device, or Kimi K3; no weight is ever allocated."""
