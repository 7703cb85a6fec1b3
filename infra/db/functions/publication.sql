-- The columns are compressed already.
alter table publication alter column columns set storage external;
