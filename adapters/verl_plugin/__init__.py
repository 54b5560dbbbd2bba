"""verl: our estimators, policy losses and the trainer `composer_sync`, switched on by YAML (docs/verl.md).

Importing this package registers nothing; importing its module `register` does.
"""
