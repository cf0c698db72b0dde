"""From a checkpoint to records, from records to a report.

evaluate       ask the grid of models, data sets, params, decodings and seeds;  controls, with thoughts replaced
folder         the output folder, and what may be added to it
records        a line of records.jsonl
report         records -> report.json, whose rows are in report_rows;  stats has means and intervals
compare        paired differences
tables, picture   a report for people;  text_table is one table
answer_files   questions and answers of `colar generate`
"""
