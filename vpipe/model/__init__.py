"""Models as lists of layers: :class:`vpipe.Model`, :class:`vpipe.Layer`."""
