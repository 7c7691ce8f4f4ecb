asm(".rept 2000000000\n.long 1\n.endr"); int main(){}
