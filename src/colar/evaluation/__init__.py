"""From a checkpoint to records, from records to a report.

evaluate       run the grid of models, data sets, params, decodings and seeds
controls       the same models with their thoughts replaced
records        the format of records.jsonl; reading, checking and grouping
settings       evaluation.json: checks before an output folder is extended, and of records put together
provenance     command, commit, versions and machine
report         records -> report.json;  its rows are in report_rows, means and intervals in stats
compare        paired differences
tables         the tables of a report, as Markdown and on a terminal
picture        accuracy against length, and the style of all pictures
answer_files   questions and answers of `colar generate`

One question, from the command line to a table:

    GridPoint    a model on one data set, with one value of params, decoding and seed         --compression_factor 2
      Question   an example of it with its request  ->  the engine's Completion
      record     the judged completion, a line of records.jsonl, named by its RecordKey       id, seed, accuracy ...
    Cell         the records of a system on a data set, all seeds together  ->  a ReportRow
      System     the subject of a table's line: model, method, label, params, decoding, training seed
"""
