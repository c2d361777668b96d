"""DFlash, a draft that fills a block in one forward from hidden states of its target."""
