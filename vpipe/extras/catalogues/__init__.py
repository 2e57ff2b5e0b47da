"""Read the messages of programs, gettext catalogues, as a text in another language and as pairs to translate."""
