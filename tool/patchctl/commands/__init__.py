"""One module a command; each exports a click command named `command` and is imported only when it is called."""
