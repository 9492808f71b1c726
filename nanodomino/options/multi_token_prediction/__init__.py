"""Multi-token prediction: layers behind the head predict further tokens.

<<<<<<< ours
    depths.py    their modules        runner.py    how domino.py runs them        settings.py    the part of Config
=======
    depths.py    their modules        runner.py    how domino.py runs them
    draft.py     generation that uses the first of them as a draft
>>>>>>> theirs
"""
