"""How near a form of the experts comes to another: texts, measures, and who predicts them."""
