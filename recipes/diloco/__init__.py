"""DiLoCo: replicas train apart and synchronise their weights every H optimizer steps."""
