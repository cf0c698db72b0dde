"""Problems as text: where rows come from, how they are read, and how an answer is judged.

sources        load_examples: the rows of a published data set, a generator or a user's file, as examples
catalogue      table of the published data sets, and a parser for each
user_rows      a user's file: read, split, guess how answers are judged; the folder of a run of `colar train auto`
layouts        parse a user's rows, by their columns
data_files     a file, a folder or the Hub -> raw rows (JSON, CSV, Parquet, ...)
fields         question, steps and answer of a raw row, checked: what all parsers make; and rows that are left out
programs       Python programs and formulas as chains of equations, and rows that hold them
example        `Example`, what all of these yield
arithmetic     a generated source
judge          is this completion the gold answer
"""
