create or replace function partition_manifest_stays() returns trigger language plpgsql as $$
    begin
        raise exception 'the manifest of partition % of table % is complete and never changes',
            old.partition, old.data_table
            using errcode = 'check_violation', constraint = 'partition_manifest_stays';
    end $$;
