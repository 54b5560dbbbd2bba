"""What a run trains: the options of a framework's config, resolved once."""
