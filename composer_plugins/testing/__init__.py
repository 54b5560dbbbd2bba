"""What our own losses are tested with, for whoever writes another one.

- `assertions`: comparing two results within a tolerance that follows from the dtype and the number of terms
- `settings`: every way to call a loss of the catalogue
- `inputs`: random inputs for a loss, by the names in its row
- `gradients`: values and gradients of a loss
- `strategies`: Hypothesis strategies for the same kinds of tensors (install `composer-plugins[test]`)

Each module is imported by its own name: `from composer_plugins.testing.assertions import assert_parity`.
"""
