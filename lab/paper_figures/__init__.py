"""The paper's figures. Each module takes records, gives the figure's data (JSON), and draws them.

factors         accuracy and #L of a model trained on random c, against models trained on one c
left_out        accuracy and #L at factors that training left out
retrieval       thoughts read as tokens at c = 2 and 5: one question's, and shares by kind of token
reinforcement   accuracy and #L over updates
scaling         accuracy over the size of the model

In the data shares are 0..1, and `half` is half of a 95% interval.
"""
