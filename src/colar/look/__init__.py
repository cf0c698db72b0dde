"""Thoughts read as tokens, compared with the reference chain, replaced by others: `colar inspect`.

thought          a thought as tokens, for the terminal, the pages and the server
reference_chain  the tokens of a reference chain in groups, its thoughts, and a pass that feeds them
diagnosis        a model's chain beside the reference's, and the first thing that goes wrong
inspect          the measurements of systems, accuracy and cost among them;  page/, their tables and the HTML
"""
