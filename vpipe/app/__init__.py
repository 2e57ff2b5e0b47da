"""The application: the command ``vpipe``, which trains models of configs, on the library's public names alone."""
