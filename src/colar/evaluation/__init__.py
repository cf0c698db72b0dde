"""From a checkpoint to records, from records to a report.

evaluate       ask the grid of models, data sets, params, decodings and seeds;  controls, with thoughts replaced
names          of checkpoints and data sets;  output_folder, what may be added to a folder
records        a line of records.jsonl
report         records -> report.json, whose rows are in report_rows, and provenance;  stats has means and intervals
compare        paired differences
tables         a report for people;  text_table is one table
accuracy_vs_length   its picture;  picture has the style of all pictures
answer_files   questions and answers of `colar generate`
"""
