"""The exact judges, one module a problem family. They read text and numbers; no judge ever runs or imports a candidate."""
