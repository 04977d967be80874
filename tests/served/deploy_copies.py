"""A deploy for test_engine_and_models.py: the model's files, without switching to them."""

from roles.model.deploy import model_files

model_files()
