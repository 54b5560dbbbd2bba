"""The composer loss in Axolotl: a plugin and a trainer class that a YAML file names."""
