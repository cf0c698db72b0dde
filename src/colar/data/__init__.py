"""Problems as text: where rows come from, how they are read, and how an answer is judged.

sources        load("gsm8k-aug", "test"): the entry; catalogue has the table of published data sets
own            a user's own file: read, split, guess how answers are judged
tables         a file, a folder or the Hub -> raw rows (JSON, CSV, Parquet, ...)
formats        rows of published data sets -> question, steps, answer; programs reads code and formulas
layouts        rows as people have them -> the same, by the columns of the first row
example        `Example`, what all of these yield
arithmetic     a generated source
judge, renumber   is this completion the gold answer; rows by other numbers
"""
