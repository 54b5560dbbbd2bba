"""Whether our losses equal the losses of the frameworks installed here: what `composer-plugins conform` runs.

- `claims`: what a claim is: our loss, a loss of an upstream, and their comparison on a drawn case
- `trl_claims`, `verl_claims` and so on: the claims of a framework, and how its own code is called
- `suites`: the claims about what is installed here, or about a checkout
- `running`: runs the claims; `tables`: the results as JSON and Markdown

The tests of the repository run the same claims on cases that Hypothesis draws.
"""
