create or replace function data_partition_stays() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' then
        raise exception 'partition % of table % never changes', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'data_partition_stays';
    end if;
    if exists (select from data_table where name = old.data_table) then
        raise exception 'partition % of table % goes only with its table', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'data_partition_stays';
    end if;
    return null;
end $$;
