"""Problems as text: where rows come from, how they are read, and how an answer is judged.

sources        load_examples: the rows of a published data set, a generator or a user's file, as examples
catalogue      table of the published data sets, and a parser for each
user_rows      a user's rows: read, how their answers are judged is guessed; divided for training, validation and test
layouts        parse a user's rows, by their columns
programs       Python programs and formulas as chains of equations, and rows that hold them
data_files     a file, a folder or the Hub -> raw rows (JSON, CSV, Parquet, ...) -> examples, or rows left out
example        `Example`, what all of these yield; `Fields`, what parsers read of one from a row's columns
arithmetic     a generated source
judge          is this completion the gold answer
"""
