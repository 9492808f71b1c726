"""Multi-token prediction: layers behind the head predict further tokens.

    depths.py    their modules        runner.py    how domino.py runs them
    draft.py     generation that uses the first of them as a draft        settings.py    the part of Config
"""
