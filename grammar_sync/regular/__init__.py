"""Regular languages: patterns read, combined, and written back for the engines."""
