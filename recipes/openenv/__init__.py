"""An OpenEnv environment with rewards and hints: an agent writes a deleted function again."""
