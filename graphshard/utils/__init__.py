"""Tools that know nothing of programs: text, progress, checks of arguments, source lines, files for people to read."""
