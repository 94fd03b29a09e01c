"""What an evaluator says when it cannot be believed: one sentence that names what was asked, what was found and what to do."""


class EvaluationError(ValueError):
    """An evaluation was refused before it could give a wrong number."""
