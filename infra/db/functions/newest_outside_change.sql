create or replace function newest_outside_change() returns bigint language sql stable as $$select last_value from outside_change$$;
