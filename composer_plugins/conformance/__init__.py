"""Whether our losses equal those of the frameworks installed here: what `composer-plugins conform` runs.

- `claims`: what a claim is: a loss of ours, a loss of an upstream, and their comparison on a drawn case
- `trl_claims`, `verl_claims`, `prime_rl_claims`: the claims of a framework, and how its own code is called
- `frameworks`: which frameworks there are, in which versions, and how to install one
- `running`: runs the claims; `tables`: the results as JSON and Markdown

The tests of the repository run the same claims on cases that Hypothesis draws.
"""
