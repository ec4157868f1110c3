"""SGLang's classes of the models that most tests serve, which it uses without importing every other model."""
