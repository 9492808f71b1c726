"""Multi-token prediction: layers behind the head predict further tokens.

    depths.py    their modules        runner.py    how domino.py runs them
"""
