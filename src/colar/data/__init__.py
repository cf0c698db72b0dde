"""Problems as text: the sources of rows, their parsers, and the judge of answers.

sources        load_examples: the rows of a published data set, a generator or a user's file, as examples
catalogue      table of the published data sets, and a parser for each
user_rows      read a user's rows;  answer_types: the type of their answers
layouts        parse a user's rows, by their columns;  chats: those that hold a chat
reasoning      the reasoning in a text, parted from the answer and cut into steps
held_out       the questions of a user's rows that are held out for validation and the test
programs       Python programs and formulas as chains of equations, and parsers of rows that hold them
data_files     a file, a folder or the Hub -> raw rows (JSON, CSV, Parquet, ...) -> examples, or rows left out
example        `Example`, which every source yields; `Fields`, the parsed columns of one row
arithmetic     a generated source
judge          compares a completion with the gold answer
"""
