"""From a checkpoint to records, from records to a report.

evaluate       ask the grid of models, data sets, params, decodings and seeds
controls       the same models with their thoughts replaced
records        a line of records.jsonl, what may be added to an output folder, provenance
report         records -> report.json, whose rows are in report_rows;  stats has means and intervals
compare        paired differences
tables         a report for people, and one table for Markdown and the terminal
picture        accuracy against length, and the style of all pictures
answer_files   questions and answers of `colar generate`

One question, from the command line to a table:

    GridPoint    a model asked a data set's questions in one way, under one decoding seed     --compression_factor 2
      Question   an example of it with its request  ->  the engine's Completion
      record     the judged completion, a line of records.jsonl, named by its RecordKey       id, seed, accuracy ...
    Cell         the records of a system on a data set, all seeds together  ->  a ReportRow
      System     what a line of a table is about: model, method, label, params, decoding, training seed
"""
