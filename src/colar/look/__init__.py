"""Thoughts read as tokens, compared with the reference chain, replaced by others: `colar inspect`.

thought          a thought as tokens, for the terminal, the pages and the server
inspect          the measurements of systems, accuracy and cost among them;  page/, their tables and the HTML
reference_chain  what a model should think
diagnosis        its own chain beside that, and the first thing that goes wrong
"""
